"""Tools that tie the book to the package."""
