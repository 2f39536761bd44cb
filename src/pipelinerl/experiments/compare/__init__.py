"""`pipelinerl lab compare`: compares schedules by real runs on one machine, each schedule with its best settings."""
