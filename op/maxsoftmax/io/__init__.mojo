"""Where the elements of rows come from and go to."""
