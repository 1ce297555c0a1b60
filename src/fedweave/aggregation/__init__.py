"""Step 3, server side: streaming weighted sums of client deltas."""
