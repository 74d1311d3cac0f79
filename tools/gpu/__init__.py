"""The kit for a GPU machine without network: pack it here, carry it there in parts, measure, rehearse on a CPU."""
