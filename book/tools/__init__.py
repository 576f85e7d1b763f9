"""Tools that tie the book to the package."""

from book.tools.explorer import Explorer as Explorer
from book.tools.stepper import Stepper as Stepper
