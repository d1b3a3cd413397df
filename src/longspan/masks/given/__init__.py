"""What people bring from elsewhere in place of a mask: tables of True and False, and words of other libraries."""
