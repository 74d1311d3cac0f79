"""Hooks: messages of the outbox, signed and sent to their receivers."""
