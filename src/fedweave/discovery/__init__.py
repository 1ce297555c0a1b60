"""Step 1, client side: prompt features to buckets, buckets to warmup signatures."""
