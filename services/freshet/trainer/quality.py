"""Progressive quality: of the training model before each update, and of what was served."""
