"""Histories: the ordered records of named sessions."""
