"""A paged serving engine small enough to read at once; it stands for yours."""
