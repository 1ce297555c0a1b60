"""Step 2, server side: signature distance, agglomerative alignment into M experts."""
