"""One process: masks, layouts, schedules, kernels, and all ranks in one process."""
