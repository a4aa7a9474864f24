"""What travels between processes: codecs of rows and gradients, and what they cost and save."""
