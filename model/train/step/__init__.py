"""What one training step does: loss, gradients, optimizer, schedule, averaging, several processes."""
