from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput
from freshet.rpc.protobuf import DESCRIPTORS, GATEWAY, OIP, messages, parse
from ops.protos import compiled


def test_the_descriptors_are_those_of_the_proto_files():
    assert Path(DESCRIPTORS).read_bytes() == compiled(), "run python -m ops.protos"


def test_a_message_is_parsed_as_serialized():
    asked = messages(GATEWAY).PutRequest(id=2**63, body=b"\0\xff", stream=2, encoding=4)
    assert parse(messages(GATEWAY).PutRequest, asked.SerializeToString()) == asked


def test_a_message_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no message Nobody"):
        _ = messages(OIP).Nobody


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_bad_input(data):
    for message_class in (messages(OIP).ModelInferRequest, messages(GATEWAY).PutRequest):
        try:
            parse(message_class, data)
        except BadInput as error:
            assert message_class.DESCRIPTOR.full_name in str(error)  # noqa: PT017  (either is right)
