"""What is measured of a converted model, and the pages that report it."""
