"""What `bench`, `calibrate` and `trace` measure under torchrun, and how they fit and write it."""
