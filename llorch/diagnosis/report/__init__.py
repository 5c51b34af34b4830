"""JSON, JUnit and one HTML page of a diagnosis."""
