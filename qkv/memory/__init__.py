"""The memory report: what is resident, what will be, and why."""
