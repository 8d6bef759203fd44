"""Data sets: found on disk or downloaded, and never used unless their checksums are right."""
