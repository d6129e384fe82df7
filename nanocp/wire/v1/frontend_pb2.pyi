from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromFrontEnd(_message.Message):
    __slots__ = ("hello", "submission", "abort", "resubmitted", "observed", "drained")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESUBMITTED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    hello: FrontEndHello
    submission: Submission
    abort: int
    resubmitted: FrontEndAnswer
    observed: Observations
    drained: FrontEndAnswer
    def __init__(self, hello: _Optional[_Union[FrontEndHello, _Mapping]] = ..., submission: _Optional[_Union[Submission, _Mapping]] = ..., abort: _Optional[int] = ..., resubmitted: _Optional[_Union[FrontEndAnswer, _Mapping]] = ..., observed: _Optional[_Union[Observations, _Mapping]] = ..., drained: _Optional[_Union[FrontEndAnswer, _Mapping]] = ...) -> None: ...

class FrontEndHello(_message.Message):
    __slots__ = ("grpc_address", "http_address", "failure", "pid", "newest_id")
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_ID_FIELD_NUMBER: _ClassVar[int]
    grpc_address: str
    http_address: str
    failure: str
    pid: int
    newest_id: int
    def __init__(self, grpc_address: _Optional[str] = ..., http_address: _Optional[str] = ..., failure: _Optional[str] = ..., pid: _Optional[int] = ..., newest_id: _Optional[int] = ...) -> None: ...

class FrontEndAnswer(_message.Message):
    __slots__ = ("is_complete",)
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    is_complete: bool
    def __init__(self, is_complete: _Optional[bool] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "max_tokens", "row_start", "priority", "queue_timeout_us", "resumes", "front_end", "prompt_logprobs", "page_hashes", "attempt", "client_id", "tenant", "sampler_work")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PAGE_HASHES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_WORK_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    row_start: bytes
    priority: int
    queue_timeout_us: int
    resumes: bool
    front_end: str
    prompt_logprobs: int
    page_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    attempt: int
    client_id: str
    tenant: str
    sampler_work: int
    def __init__(self, request_id: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., row_start: _Optional[bytes] = ..., priority: _Optional[int] = ..., queue_timeout_us: _Optional[int] = ..., resumes: _Optional[bool] = ..., front_end: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., page_hashes: _Optional[_Iterable[bytes]] = ..., attempt: _Optional[int] = ..., client_id: _Optional[str] = ..., tenant: _Optional[str] = ..., sampler_work: _Optional[int] = ...) -> None: ...

class Observations(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: bytes
    def __init__(self, calls: _Optional[bytes] = ...) -> None: ...

class ToFrontEnd(_message.Message):
    __slots__ = ("opened", "secret", "placed", "preempted", "interrupted", "tokens_lost", "ended", "load", "drain", "stop")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LOST_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    opened: FrontEndOpened
    secret: MemberSecret
    placed: RequestPlaced
    preempted: RequestPreempted
    interrupted: FrontEndAnswer
    tokens_lost: RequestTokensLost
    ended: RequestEnded
    load: bytes
    drain: FrontEndAnswer
    stop: str
    def __init__(self, opened: _Optional[_Union[FrontEndOpened, _Mapping]] = ..., secret: _Optional[_Union[MemberSecret, _Mapping]] = ..., placed: _Optional[_Union[RequestPlaced, _Mapping]] = ..., preempted: _Optional[_Union[RequestPreempted, _Mapping]] = ..., interrupted: _Optional[_Union[FrontEndAnswer, _Mapping]] = ..., tokens_lost: _Optional[_Union[RequestTokensLost, _Mapping]] = ..., ended: _Optional[_Union[RequestEnded, _Mapping]] = ..., load: _Optional[bytes] = ..., drain: _Optional[_Union[FrontEndAnswer, _Mapping]] = ..., stop: _Optional[str] = ...) -> None: ...

class FrontEndOpened(_message.Message):
    __slots__ = ("first_id", "front_ends")
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    FRONT_ENDS_FIELD_NUMBER: _ClassVar[int]
    first_id: int
    front_ends: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, first_id: _Optional[int] = ..., front_ends: _Optional[_Iterable[str]] = ...) -> None: ...

class MemberSecret(_message.Message):
    __slots__ = ("name", "secret")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    name: str
    secret: str
    def __init__(self, name: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class RequestPlaced(_message.Message):
    __slots__ = ("request_id", "moe_binding", "num_tokens", "holders", "num_cached")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MOE_BINDING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    moe_binding: int
    num_tokens: int
    holders: _containers.RepeatedCompositeFieldContainer[PlacedPages]
    num_cached: int
    def __init__(self, request_id: _Optional[int] = ..., moe_binding: _Optional[int] = ..., num_tokens: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[PlacedPages, _Mapping]]] = ..., num_cached: _Optional[int] = ...) -> None: ...

class PlacedPages(_message.Message):
    __slots__ = ("first_page", "instance")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    instance: int
    def __init__(self, first_page: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...

class RequestPreempted(_message.Message):
    __slots__ = ("request_id", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    num_tokens: int
    def __init__(self, request_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RequestTokensLost(_message.Message):
    __slots__ = ("request_id", "sentence")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    sentence: str
    def __init__(self, request_id: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class RequestEnded(_message.Message):
    __slots__ = ("request_id", "reason", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reason: str
    message: str
    def __init__(self, request_id: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PageRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Page(_message.Message):
    __slots__ = ("content", "failure")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    failure: str
    def __init__(self, content: _Optional[bytes] = ..., failure: _Optional[str] = ...) -> None: ...
