"""Fused Triton kernels and their launchers: tensors in, tensors out.

The folder is `primitives.kernels` to whoever imports it, in a checkout by a link: another project installs the name
`triton_kernels`. Nothing here knows about autograd or transforms, and nothing imports the rest of `primitives`; a
launcher views its tensors as rows or channels, allocates its outputs, asks the planner of its room for a plan, and
launches.
"""
