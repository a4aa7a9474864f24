"""The trainer: forward, backward and the dense step, in lanes; dense versions and the gate.

Consumes: batches (`BatchStream`); for a native model with rows in the process, runs of them (`RunStream`):
native code looks their rows up and pushes (`NativeRows`).
Produces: row gradients, versions (`VersionStore`, `<model>.versions`), measures (`<model>.measures`).
Owns: the dense weights and their `applied` vector, under the membership lease `trainer:0`.
Guarantees: the vector changes in the same step as the weights; every sample is scored before it is learned;
a version that is not finite is never a restart point.
"""
