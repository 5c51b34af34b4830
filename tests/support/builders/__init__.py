"""Makers of what tests read: models, files, folders, adapters, vocabularies, dumps and diagnoses."""
