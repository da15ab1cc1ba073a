"""An oracle of the joint problem without any linear program: every fate of every value, added up one by one.

Seconds and bytes of the single options are the problem's own; what is checked is how they are put together, what may be
rederived from what, and that the solver finds the best of all.

plans       every fate, with its seconds and its peak
sharding    what the sharding alone decides: what is asked for, how large it is, which copies serve several regions
fates       how many instances of what rerun, convert again, are kept, are offloaded
seconds     what a fate takes
pieces      what is kept for the backward, and when it is there
forward, backward, gradients, reruns    what is held at a moment of each
"""

from tests.planner_oracle.plans import Oracle

__all__ = ["Oracle"]
