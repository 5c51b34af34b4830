"""What llorch writes: the generated parts of the checkpoint pages; a diagnosis as JSON, JUnit and one HTML page."""
