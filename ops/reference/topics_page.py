"""The topics of a model, from their descriptors."""

from __future__ import annotations

from freshet.config.spec.topics import KINDS_OF_TOPICS, TopicKind
from ops.reference.markdown import code, escaped, grid, header

INTRO = """\
Services meet in topics of the event log. `<model>` is the spec's `name`; the topics of events are called
as the spec says (`events.served.topic`), or as here. The first service to start creates them all; one that
exists with another number of partitions is refused. `freshet peek TOPIC` shows records; what stands in
them byte for byte is in [schemas/README.md](../../schemas/README.md).

On one machine retention by time never removes records that a service needs for its restart (`EventLog.hold`).
On Kafka nothing holds it back: what is older goes, whether it was read or not, and
[FreshetRetentionNear](../../ops/runbooks/FreshetRetentionNear.md) warns before.
"""

HEAD = ("topic", "holds", "partitions", "kept", "written by", "read by", "`kind` of JSON records")

JOINED = """
Topics marked * change together: the joiner appends samples and its commit in one atomic write, which is why
a sample is never written twice and never lost.
"""


def page() -> str:
    """The whole page."""
    lines = [
        header("Topics", "services/freshet/config/spec/topics.py"),
        INTRO,
        *grid(map(_row, KINDS_OF_TOPICS), HEAD),
    ]
    return "\n".join([*lines, JOINED])


def _row(topic: TopicKind) -> tuple[str, ...]:
    return (
        code(topic.name) + (" *" if topic.joined else ""),
        escaped(topic.holds),
        str(topic.partitions or "`partitions`"),
        code(f"retention.{topic.kept}") if topic.kept else "for ever",
        topic.written_by,
        topic.read_by,
        ", ".join(code(kind) for kind in topic.kinds),
    )
