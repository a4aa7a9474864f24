"""The row store on Redis."""
