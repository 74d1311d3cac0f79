"""The harvester: from leases to journalled answers."""
