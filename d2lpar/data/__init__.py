"""Data to train on: Fashion-MNIST or its synthetic stand-in, in batches that split over devices."""
