"""A run's metrics: records, the sinks they are written to, the timeline and the summary. Does not import torch."""
