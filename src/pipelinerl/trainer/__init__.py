"""The trainer stage: queue, loss, optimizer step, ESS guard, checkpoints, and publishing weights."""
