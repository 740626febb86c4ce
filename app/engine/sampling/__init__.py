"""The sampling specification in torch: penalties, masks, filters, the draw, log-probabilities."""
