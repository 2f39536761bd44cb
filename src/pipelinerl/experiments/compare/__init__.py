"""`pipelinerl compare`: schedules against one another on one machine, each with its best settings, from real runs."""
