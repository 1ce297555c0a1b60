"""Step 3, client side: interleaved local training of the soft mixture, many clients in lockstep."""
