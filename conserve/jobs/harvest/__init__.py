"""From leases to journalled answers."""
