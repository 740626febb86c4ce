"""Says before a run what it will take: dataset size, time, memory, disk."""
