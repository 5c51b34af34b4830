"""What llorch writes about itself: the generated parts of the checkpoint pages."""
