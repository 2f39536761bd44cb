"""`pipelinerl sweep`: the same run with other settings and seeds, one after another, and which settings are best."""
