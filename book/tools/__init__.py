"""Tools that tie the book to the package."""

from book.tools.stepper import Stepper as Stepper
