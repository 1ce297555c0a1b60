"""What an expert is, by the prompts that it gets: found without labels, kept in a file, shown everywhere."""
