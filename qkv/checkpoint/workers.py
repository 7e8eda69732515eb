"""Shards written by several processes: independent work, the same bytes as one process writes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkv.checkpoint.job import Job
from qkv.checkpoint.plan import Shard
from qkv.checkpoint.shard_writer import write_shard
from qkv.errors import CheckpointError, QkvError

Wrote = Callable[[str], None]
Synced = Callable[[str, int], None]


class Task(NamedTuple):
    """A shard to write, and how many of its pieces an earlier run has written."""

    shard: Shard
    num_done: int


def write_shards(folder: Path, tasks: Sequence[Task], job: Job, workers: int, wrote: Wrote, synced: Synced) -> None:
    """Write shards, in this process or in others.

    Args:
        folder: where they go.
        tasks: the shards.
        job: what they are made of.
        workers: processes; with 1 this one does the work.
        wrote: called here with each piece of the job that was written.
        synced: called with a shard's file and how many of its pieces are surely on the disk; never twice at a time.

    Raises:
        QkvError, OSError: what a shard raised, the first; the other processes are stopped.
        CheckpointError: a process was killed.
    """
    if workers == 1:
        for task in tasks:
            _write(folder, task, job, wrote, synced)
        return
    crew: dict[Connection, BaseProcess] = {}
    waiting = list(reversed(tasks))
    try:
        for _ in range(min(workers, len(tasks))):
            connection, process = _hire(folder, job, workers)
            crew[connection] = process
            connection.send(waiting.pop())
        while crew:
            ready = wait(list(crew))
            for connection in [each for each in crew if each in ready]:
                if _hear(connection, crew[connection], wrote, synced):
                    continue
                if waiting:
                    connection.send(waiting.pop())
                else:
                    _dismiss(connection, crew.pop(connection))
    finally:
        for connection, process in crew.items():
            process.kill()  # what it was writing is kept up to its last sync, or goes with the folder
            _dismiss(connection, process)


def _write(folder: Path, task: Task, job: Job, wrote: Wrote, synced: Synced) -> None:
    file = task.shard.file
    write_shard(folder / file, task.shard, job, task.num_done, wrote, lambda pieces: synced(file, pieces))


def _hire(folder: Path, job: Job, workers: int) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads that it does not copy
    ours, theirs = context.Pipe()
    threads = max(1, torch.get_num_threads() // workers)
    process = context.Process(target=_work, args=(theirs, folder, job, threads), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _hear(connection: Connection, process: BaseProcess, wrote: Wrote, synced: Synced) -> bool:
    """Take one message; whether the worker is still at its task."""
    try:
        kind, *details = connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise CheckpointError(
            f"a worker process ended with status {process.exitcode}: out of memory (take fewer workers), killed, or "
            'started from a script without `if __name__ == "__main__":`'
        ) from None
    if kind == "failed":
        raise details[0]
    if kind == "wrote":
        wrote(*details)
    elif kind == "synced":
        synced(*details)
    return bool(kind != "finished")


def _dismiss(connection: Connection, process: BaseProcess) -> None:
    connection.close()  # a worker that waits for its next task ends
    process.join()


def _work(connection: Connection, folder: Path, job: Job, threads: int) -> None:
    """What a worker process does: tasks until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    lock = threading.Lock()

    def say(*message: Any) -> None:
        with lock:
            connection.send(message)

    with suppress(EOFError, ConnectionError):
        while True:
            task = connection.recv()
            try:
                _write(folder, task, job, lambda name: say("wrote", name), lambda file, n: say("synced", file, n))
            except (QkvError, OSError) as error:
                say("failed", error)
            except BaseException:
                say("failed", RuntimeError(traceback.format_exc()))
            else:
                say("finished")


def _end_with_parent() -> None:
    """A worker whose parent was killed must not go on writing into a folder that another run takes over."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
