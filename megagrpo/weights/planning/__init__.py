"""Division of a plan among the ranks: which source sends which bytes to which destination.

Ranks that hold the same boxes are one class, and bytes with the same holders and the same takers are one bundle
(bundles.py); a few thousand bundles are then cut among the sources that hold them (routes.py). The result is a few
numbers for each cut, so that a cluster of thousands of ranks is planned in seconds; a rank's own transfers are written
out when it asks for them.
"""
