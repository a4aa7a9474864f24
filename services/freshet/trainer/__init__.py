"""The trainer: forward, backward and the dense step, in lanes; dense versions and the gate.

Consumes: batches (`BatchStream`).
Produces: row gradients (through the stream), versions (`VersionStore`, `<model>.versions`), measures
(`<model>.measures`).
Owns: the dense weights and their `applied` vector, under the membership lease `trainer:0`.
Guarantees: the vector changes in the same step as the weights; every sample is scored before it is learned;
a version that is not finite is never a restart point.
"""
