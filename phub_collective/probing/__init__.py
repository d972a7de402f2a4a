"""The links between the hosts of a job: `measure` them pair by pair, in the order of a
`tournament`, into a `matrix`; find `groups` of hosts in it; print a `report` (`phub probe`)."""
