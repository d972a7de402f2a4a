"""The rack lab: one machine plays a rack of workers and PBoxes, in network namespaces whose links
are shaped. scripts/rack.py is its command line."""
