"""The switches: one for every part of a ◆ rule that can be broken on its own.

The string under a field says what the broken implementation does instead. Each is something that a reasonable
person could have written; none of them reads the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Rules:
    """Which rules hold; all of them unless a test says otherwise."""

    range_starts_at_previous_stop: bool = True
    """2: off, a range starts at its first record, so gaps and transaction markers belong to no range."""
    batch_applies_as_one: bool = True
    """2: off, a shard goes range by range: it applies the batch's gradient if any of its ranges is new."""

    push_checked_before_touched: bool = True
    """4: off, rows are touched bucket by bucket while the push is still being checked."""
    mixture_is_refused: bool = True
    """4: off, a push of which some ranges were applied counts as one that was applied."""
    push_refused_whole: bool = True
    """4: off, the buckets that fit are applied and the push is acknowledged; the others are left out."""
    push_names_its_buckets: bool = True
    """4: off, a push advances every bucket that the shard owns, wherever the sender thinks they are."""
    rows_and_applied_one_hold: bool = True
    """4: off, `applied` is advanced a moment after the rows."""
    flush_copies_one_hold: bool = True
    """4: off, a flush copies `applied` a moment after the rows."""

    rewind_on_new_owner: bool = True
    """7: off, the embedder adopts the new map and carries on where it is."""
    rewind_to_smallest: bool = True
    """7: off, the embedder rewinds to the largest reported offset."""
    cut_points: bool = True
    """7: off, ranges may cross the reported offsets."""
    single_range_before_cuts: bool = True
    """2, 7: off, a partition with such offsets ahead shares its batches with other partitions."""

    requests_name_the_claim: bool = True
    """7, 9 (found here): off, an owner answers for a bucket under whatever claim it holds it."""

    fence_is_log_offset: bool = True
    """9: off, a fence is the one found in the row store plus one."""
    first_claim_wins: bool = True
    """9: off, a claim counts whatever it says it replaces."""
    lease_of_readable_log: bool = True
    """9: off, a lease also runs out while the log cannot be read."""

    claim_writes_fence: bool = True
    """10: off, a claimant reads the bucket without writing its fence first."""
    claim_rereads_meta: bool = True
    """10: off, a claimant believes its first scan."""
    claim_reads_masters: bool = True
    """10: off, a claimant may read from replicas."""

    absence_is_asked_for: bool = True
    """10, 13: off, a row that is not in memory yet counts as absent while its bucket is loaded."""
    scan_leaves_what_is_here: bool = True
    """10: off, a scan writes over rows that have learned since the claim."""
    loading_is_not_flushed: bool = True
    """10: off, a bucket is flushed before its scan was found to be right."""
    doubt_changes_owner: bool = True
    """7, 10: off, a bucket whose `meta` changed while it was loaded is read again, and its owner stays."""

    row_on_disk_is_read: bool = True
    """8: off, a push to a row that is on the shard's disk alone counts as one to an absent row."""
    flush_takes_rows_on_disk: bool = True
    """12: off, a flush takes rows from memory only."""

    claim_publishes_whole: bool = True
    """10, 17 (found here): off, a claimant publishes nothing, even of rows that another owner wrote."""

    flush_compares: bool = True
    """11: off, a flush writes its increment on top of whatever is stored."""
    store_refuses_lower_fence: bool = True
    """9, 11: off, the row store ignores fences."""
    mismatch_replaces: bool = True
    """11: off, after a mismatch the owner adopts the stored sequence and writes its increment again."""
    flush_atomic: bool = True
    """11: off, rows and `meta` are written one after the other."""
    replace_deletes_first: bool = True
    """11: off, a replacement leaves rows in the store that the owner does not have."""

    dense_ranges_gathered: bool = True
    """14: off, each rank judges its batch without seeing the other's."""
    dense_repeat_weighs_nothing: bool = True
    """14: off, a repeated range counts again."""
    dense_repeat_keeps_rows: bool = True
    """14: off, a range that dense has applied gives no embedding gradient either."""
    dense_gap_goes_back: bool = True
    """14: off, a range that does not follow the vector counts, and the vector jumps."""
    vector_saved_with_weights: bool = True
    """14: off, a version reads its vector a moment after its weights."""
    version_at_flush_point: bool = True
    """15: off, a version is written between two flush points, without the ranks' residuals."""
    loss_rolls_back: bool = True
    """15: off, survivors go on from their highest step, without the residual of the lost rank."""

    reader_meta_first: bool = True
    """17: off, a reader scans the rows and then reads from where to follow."""
    reader_one_node: bool = True
    """17: off, a reader's scan may go on at another node, or at the same one after a failover."""
    reader_drops_lower_fence: bool = True
    """17: off, a reader takes every delta in log order."""
    reader_starts_at_writer: bool = True
    """17 (found here): off, a reader starts with the fence of the last claim instead of the last flush."""
    read_through_if_absent: bool = True
    """17: off, the answer of a read-through overwrites what the reader has."""
    flush_publishes_first: bool = True
    """17: off, rows are flushed and counted as published without waiting for the log."""
    replace_publishes_whole: bool = True
    """17: off, a replaced bucket publishes only its changed rows."""
    rows_offset_of_the_copy: bool = True
    """17: off, `meta` names the end of `rows` when it is written, not when the flushed rows were copied."""

    joiner_commit_atomic: bool = True
    """18: off, samples are committed first and the joiner's offsets a moment later."""
    joiner_rebuilds: bool = True
    """18: off, a restarted joiner goes on from `next` with an empty state."""
    joiner_rebuilds_silently: bool = True
    """18: off, a restarted joiner emits while it rebuilds."""
    joiner_restores_watermark: bool = True
    """18: off, a restarted joiner computes the watermark anew."""
    joiner_restores_beginning: bool = True
    """18: off, a restarted joiner counts the warm-up from the first impression that it reads again."""
    no_one_clock_moves_time: bool = True
    """19: off, an event's own time alone shows how far its topic has come, and not the log's time too."""
    joiner_low_covers_horizon: bool = True
    """18, 20: off, the low offset covers pending impressions only, not the ids kept to recognise repeats."""

    def without(self, rule: str) -> Rules:
        """These rules with one of them broken."""
        return replace(self, **{rule: False})


RULE_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Rules))
