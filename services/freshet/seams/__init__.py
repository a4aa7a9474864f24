"""The five protocols that parts meet in, each with its adapters; above a seam nobody knows which one is in
use."""
