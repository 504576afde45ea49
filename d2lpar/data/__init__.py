"""Data sets: Fashion-MNIST and CIFAR-10, or synthetic stand-ins; batches split over devices."""
