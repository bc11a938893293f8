"""inspection: what can be seen of a machine in well under two seconds, and what to do about it; `weft doctor`."""
