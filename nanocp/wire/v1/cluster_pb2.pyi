from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromInstance(_message.Message):
    __slots__ = ("hello", "ready", "window_done", "transfer_done", "transfer_fenced", "resync", "failure", "tokens_lost", "loading", "left", "suspect", "heartbeat", "layers_moved", "transfer_missed", "term")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_DONE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_DONE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FENCED_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LOST_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MISSED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    hello: InstanceHello
    ready: InstanceReady
    window_done: WindowDone
    transfer_done: TransferAnswer
    transfer_fenced: TransferAnswer
    resync: ResyncRequest
    failure: Failure
    tokens_lost: TokensLost
    loading: InstanceLoading
    left: Left
    suspect: Suspect
    heartbeat: Heartbeat
    layers_moved: int
    transfer_missed: TransferAnswer
    term: int
    def __init__(self, hello: _Optional[_Union[InstanceHello, _Mapping]] = ..., ready: _Optional[_Union[InstanceReady, _Mapping]] = ..., window_done: _Optional[_Union[WindowDone, _Mapping]] = ..., transfer_done: _Optional[_Union[TransferAnswer, _Mapping]] = ..., transfer_fenced: _Optional[_Union[TransferAnswer, _Mapping]] = ..., resync: _Optional[_Union[ResyncRequest, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., tokens_lost: _Optional[_Union[TokensLost, _Mapping]] = ..., loading: _Optional[_Union[InstanceLoading, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., suspect: _Optional[_Union[Suspect, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., layers_moved: _Optional[int] = ..., transfer_missed: _Optional[_Union[TransferAnswer, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[FromStream]
    def __init__(self, items: _Optional[_Iterable[_Union[FromStream, _Mapping]]] = ...) -> None: ...

class FromStream(_message.Message):
    __slots__ = ("stream", "opened", "message", "closed")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    stream: int
    opened: Opened
    message: bytes
    closed: bool
    def __init__(self, stream: _Optional[int] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., message: _Optional[bytes] = ..., closed: _Optional[bool] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("name", "secret")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    name: str
    secret: str
    def __init__(self, name: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class ToNode(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ToStream]
    def __init__(self, items: _Optional[_Iterable[_Union[ToStream, _Mapping]]] = ...) -> None: ...

class ToStream(_message.Message):
    __slots__ = ("stream", "message", "end")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stream: int
    message: bytes
    end: bool
    def __init__(self, stream: _Optional[int] = ..., message: _Optional[bytes] = ..., end: _Optional[bool] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Suspect(_message.Message):
    __slots__ = ("instance", "is_gone", "message")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    instance: int
    is_gone: bool
    message: str
    def __init__(self, instance: _Optional[int] = ..., is_gone: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("awaited",)
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    awaited: int
    def __init__(self, awaited: _Optional[int] = ...) -> None: ...

class InstanceLoading(_message.Message):
    __slots__ = ("instance", "percent")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    instance: int
    percent: int
    def __init__(self, instance: _Optional[int] = ..., percent: _Optional[int] = ...) -> None: ...

class TokensLost(_message.Message):
    __slots__ = ("request_ids", "reason")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class InstanceHello(_message.Message):
    __slots__ = ("instance", "pid", "where", "kept")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    instance: int
    pid: int
    where: Peer
    kept: KeptPages
    def __init__(self, instance: _Optional[int] = ..., pid: _Optional[int] = ..., where: _Optional[_Union[Peer, _Mapping]] = ..., kept: _Optional[_Union[KeptPages, _Mapping]] = ...) -> None: ...

class KeptPages(_message.Message):
    __slots__ = ("request_id", "first_page", "num_pages", "frame")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    request_id: _containers.RepeatedScalarFieldContainer[int]
    first_page: _containers.RepeatedScalarFieldContainer[int]
    num_pages: _containers.RepeatedScalarFieldContainer[int]
    frame: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[_Iterable[int]] = ..., first_page: _Optional[_Iterable[int]] = ..., num_pages: _Optional[_Iterable[int]] = ..., frame: _Optional[_Iterable[int]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node", "address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class InstanceReady(_message.Message):
    __slots__ = ("num_graphs", "selected")
    NUM_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    num_graphs: int
    selected: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_graphs: _Optional[int] = ..., selected: _Optional[_Iterable[str]] = ...) -> None: ...

class WindowDone(_message.Message):
    __slots__ = ("window", "finished", "step_us", "exchange_us", "num_tokens", "num_rows", "num_received", "bucket_rows", "bucket_received", "route_bytes", "expert_bytes", "mask_us", "wait_us", "written", "hidden_us")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_ROWS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    ROUTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MASK_US_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_US_FIELD_NUMBER: _ClassVar[int]
    window: int
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    step_us: int
    exchange_us: int
    num_tokens: int
    num_rows: int
    num_received: int
    bucket_rows: int
    bucket_received: int
    route_bytes: int
    expert_bytes: int
    mask_us: int
    wait_us: _containers.RepeatedScalarFieldContainer[int]
    written: _containers.RepeatedCompositeFieldContainer[WrittenPage]
    hidden_us: int
    def __init__(self, window: _Optional[int] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., step_us: _Optional[int] = ..., exchange_us: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_received: _Optional[int] = ..., bucket_rows: _Optional[int] = ..., bucket_received: _Optional[int] = ..., route_bytes: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., mask_us: _Optional[int] = ..., wait_us: _Optional[_Iterable[int]] = ..., written: _Optional[_Iterable[_Union[WrittenPage, _Mapping]]] = ..., hidden_us: _Optional[int] = ...) -> None: ...

class WrittenPage(_message.Message):
    __slots__ = ("request_id", "attempt", "page", "page_hash")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_HASH_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    page: int
    page_hash: bytes
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., page: _Optional[int] = ..., page_hash: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "num_tokens", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    num_tokens: int
    reason: str
    def __init__(self, request_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class TransferAnswer(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class ResyncRequest(_message.Message):
    __slots__ = ("window", "reason")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    window: int
    reason: str
    def __init__(self, window: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class ToInstance(_message.Message):
    __slots__ = ("join", "plan", "expect", "fence", "shutdown", "send", "leave", "pass_plan", "layer_moves", "prompt", "stow", "fetch", "term")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    PASS_PLAN_FIELD_NUMBER: _ClassVar[int]
    LAYER_MOVES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    STOW_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    join: Join
    plan: InstancePlan
    expect: Transfer
    fence: int
    shutdown: Shutdown
    send: Transfer
    leave: Leave
    pass_plan: PassPlan
    layer_moves: LayerMoves
    prompt: Prompt
    stow: Stow
    fetch: Fetch
    term: int
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., plan: _Optional[_Union[InstancePlan, _Mapping]] = ..., expect: _Optional[_Union[Transfer, _Mapping]] = ..., fence: _Optional[int] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., send: _Optional[_Union[Transfer, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., pass_plan: _Optional[_Union[PassPlan, _Mapping]] = ..., layer_moves: _Optional[_Union[LayerMoves, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., stow: _Optional[_Union[Stow, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("peers", "newest_ticket", "seats", "expert_seats", "expert_slots", "keeps_rows")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_TICKET_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_SEATS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_ROWS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    newest_ticket: int
    seats: _containers.RepeatedScalarFieldContainer[int]
    expert_seats: _containers.RepeatedScalarFieldContainer[int]
    expert_slots: _containers.RepeatedScalarFieldContainer[int]
    keeps_rows: bool
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., newest_ticket: _Optional[int] = ..., seats: _Optional[_Iterable[int]] = ..., expert_seats: _Optional[_Iterable[int]] = ..., expert_slots: _Optional[_Iterable[int]] = ..., keeps_rows: _Optional[bool] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class InstancePlan(_message.Message):
    __slots__ = ("instance", "window", "first_step", "num_steps", "base_digest", "result_digest", "is_full", "changes", "starts", "hand_offs_out", "hand_offs_in", "ends", "two_lanes")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    HAND_OFFS_OUT_FIELD_NUMBER: _ClassVar[int]
    HAND_OFFS_IN_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    TWO_LANES_FIELD_NUMBER: _ClassVar[int]
    instance: int
    window: int
    first_step: int
    num_steps: int
    base_digest: int
    result_digest: int
    is_full: bool
    changes: TableChanges
    starts: _containers.RepeatedCompositeFieldContainer[RowStart]
    hand_offs_out: _containers.RepeatedCompositeFieldContainer[HandOff]
    hand_offs_in: _containers.RepeatedCompositeFieldContainer[HandOff]
    ends: _containers.RepeatedScalarFieldContainer[int]
    two_lanes: bool
    def __init__(self, instance: _Optional[int] = ..., window: _Optional[int] = ..., first_step: _Optional[int] = ..., num_steps: _Optional[int] = ..., base_digest: _Optional[int] = ..., result_digest: _Optional[int] = ..., is_full: _Optional[bool] = ..., changes: _Optional[_Union[TableChanges, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[RowStart, _Mapping]]] = ..., hand_offs_out: _Optional[_Iterable[_Union[HandOff, _Mapping]]] = ..., hand_offs_in: _Optional[_Iterable[_Union[HandOff, _Mapping]]] = ..., ends: _Optional[_Iterable[int]] = ..., two_lanes: _Optional[bool] = ...) -> None: ...

class TableChanges(_message.Message):
    __slots__ = ("forgotten", "row_index", "row_request", "q_route", "res_route", "page_request", "page_first", "page_count", "page_frame", "holders_forgotten", "holder_request", "holder_first_page", "holder_instance", "cleared_request", "cleared_first_page", "cleared_count", "row_lane")
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROW_REQUEST_FIELD_NUMBER: _ClassVar[int]
    Q_ROUTE_FIELD_NUMBER: _ClassVar[int]
    RES_ROUTE_FIELD_NUMBER: _ClassVar[int]
    PAGE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_FRAME_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    HOLDER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_LANE_FIELD_NUMBER: _ClassVar[int]
    forgotten: _containers.RepeatedScalarFieldContainer[int]
    row_index: _containers.RepeatedScalarFieldContainer[int]
    row_request: _containers.RepeatedScalarFieldContainer[int]
    q_route: RouteChanges
    res_route: RouteChanges
    page_request: _containers.RepeatedScalarFieldContainer[int]
    page_first: _containers.RepeatedScalarFieldContainer[int]
    page_count: _containers.RepeatedScalarFieldContainer[int]
    page_frame: _containers.RepeatedScalarFieldContainer[int]
    holders_forgotten: _containers.RepeatedScalarFieldContainer[int]
    holder_request: _containers.RepeatedScalarFieldContainer[int]
    holder_first_page: _containers.RepeatedScalarFieldContainer[int]
    holder_instance: _containers.RepeatedScalarFieldContainer[int]
    cleared_request: _containers.RepeatedScalarFieldContainer[int]
    cleared_first_page: _containers.RepeatedScalarFieldContainer[int]
    cleared_count: _containers.RepeatedScalarFieldContainer[int]
    row_lane: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, forgotten: _Optional[_Iterable[int]] = ..., row_index: _Optional[_Iterable[int]] = ..., row_request: _Optional[_Iterable[int]] = ..., q_route: _Optional[_Union[RouteChanges, _Mapping]] = ..., res_route: _Optional[_Union[RouteChanges, _Mapping]] = ..., page_request: _Optional[_Iterable[int]] = ..., page_first: _Optional[_Iterable[int]] = ..., page_count: _Optional[_Iterable[int]] = ..., page_frame: _Optional[_Iterable[int]] = ..., holders_forgotten: _Optional[_Iterable[int]] = ..., holder_request: _Optional[_Iterable[int]] = ..., holder_first_page: _Optional[_Iterable[int]] = ..., holder_instance: _Optional[_Iterable[int]] = ..., cleared_request: _Optional[_Iterable[int]] = ..., cleared_first_page: _Optional[_Iterable[int]] = ..., cleared_count: _Optional[_Iterable[int]] = ..., row_lane: _Optional[_Iterable[int]] = ...) -> None: ...

class RouteChanges(_message.Message):
    __slots__ = ("peer", "slot", "request", "lane")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    peer: _containers.RepeatedScalarFieldContainer[int]
    slot: _containers.RepeatedScalarFieldContainer[int]
    request: _containers.RepeatedScalarFieldContainer[int]
    lane: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, peer: _Optional[_Iterable[int]] = ..., slot: _Optional[_Iterable[int]] = ..., request: _Optional[_Iterable[int]] = ..., lane: _Optional[_Iterable[int]] = ...) -> None: ...

class RowStart(_message.Message):
    __slots__ = ("request_id", "position", "max_tokens", "row_start")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    position: int
    max_tokens: int
    row_start: bytes
    def __init__(self, request_id: _Optional[int] = ..., position: _Optional[int] = ..., max_tokens: _Optional[int] = ..., row_start: _Optional[bytes] = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("request_id", "peer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    peer: int
    def __init__(self, request_id: _Optional[int] = ..., peer: _Optional[int] = ...) -> None: ...

class PassPlan(_message.Message):
    __slots__ = ("number", "layout", "after", "table", "span_request", "span_first", "span_tokens", "span_samples")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SPAN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIRST_FIELD_NUMBER: _ClassVar[int]
    SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    number: int
    layout: int
    after: int
    table: InstancePlan
    span_request: _containers.RepeatedScalarFieldContainer[int]
    span_first: _containers.RepeatedScalarFieldContainer[int]
    span_tokens: _containers.RepeatedScalarFieldContainer[int]
    span_samples: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, number: _Optional[int] = ..., layout: _Optional[int] = ..., after: _Optional[int] = ..., table: _Optional[_Union[InstancePlan, _Mapping]] = ..., span_request: _Optional[_Iterable[int]] = ..., span_first: _Optional[_Iterable[int]] = ..., span_tokens: _Optional[_Iterable[int]] = ..., span_samples: _Optional[_Iterable[bool]] = ...) -> None: ...

class LayerMoves(_message.Message):
    __slots__ = ("number", "split", "moves")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    number: int
    split: _containers.RepeatedScalarFieldContainer[int]
    moves: _containers.RepeatedCompositeFieldContainer[LayerMove]
    def __init__(self, number: _Optional[int] = ..., split: _Optional[_Iterable[int]] = ..., moves: _Optional[_Iterable[_Union[LayerMove, _Mapping]]] = ...) -> None: ...

class LayerMove(_message.Message):
    __slots__ = ("layer", "source", "target", "place", "first_frame", "num_frames")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    source: int
    target: int
    place: int
    first_frame: _containers.RepeatedScalarFieldContainer[int]
    num_frames: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., source: _Optional[int] = ..., target: _Optional[int] = ..., place: _Optional[int] = ..., first_frame: _Optional[_Iterable[int]] = ..., num_frames: _Optional[_Iterable[int]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_logprobs", "front_end")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    front_end: str
    def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., front_end: _Optional[str] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("ticket", "request_id", "num_tokens", "first_page", "num_pages", "instance", "frame", "source")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    request_id: int
    num_tokens: int
    first_page: _containers.RepeatedScalarFieldContainer[int]
    num_pages: _containers.RepeatedScalarFieldContainer[int]
    instance: _containers.RepeatedScalarFieldContainer[int]
    frame: _containers.RepeatedScalarFieldContainer[int]
    source: int
    def __init__(self, ticket: _Optional[int] = ..., request_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_page: _Optional[_Iterable[int]] = ..., num_pages: _Optional[_Iterable[int]] = ..., instance: _Optional[_Iterable[int]] = ..., frame: _Optional[_Iterable[int]] = ..., source: _Optional[int] = ...) -> None: ...

class Stow(_message.Message):
    __slots__ = ("ticket", "source", "slot", "is_demotion", "instance")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    IS_DEMOTION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    source: _containers.RepeatedScalarFieldContainer[int]
    slot: _containers.RepeatedScalarFieldContainer[int]
    is_demotion: bool
    instance: int
    def __init__(self, ticket: _Optional[int] = ..., source: _Optional[_Iterable[int]] = ..., slot: _Optional[_Iterable[int]] = ..., is_demotion: _Optional[bool] = ..., instance: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("ticket", "page", "slot", "receiver", "instance")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    page: _containers.RepeatedScalarFieldContainer[int]
    slot: _containers.RepeatedScalarFieldContainer[int]
    receiver: _containers.RepeatedScalarFieldContainer[int]
    instance: int
    def __init__(self, ticket: _Optional[int] = ..., page: _Optional[_Iterable[int]] = ..., slot: _Optional[_Iterable[int]] = ..., receiver: _Optional[_Iterable[int]] = ..., instance: _Optional[int] = ...) -> None: ...

class RowInput(_message.Message):
    __slots__ = ("last_token", "params", "front_end", "output_ids", "prompt_ids", "attempt", "page_hash", "page_ids")
    LAST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAGE_HASH_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    last_token: int
    params: SamplingParams
    front_end: str
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    page_hash: bytes
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, last_token: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., front_end: _Optional[str] = ..., output_ids: _Optional[_Iterable[int]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., page_hash: _Optional[bytes] = ..., page_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_token_id", "bias", "bad_words", "logprobs", "constraint")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_id: _containers.RepeatedScalarFieldContainer[int]
    bias: _containers.RepeatedScalarFieldContainer[float]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    logprobs: int
    constraint: str
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_token_id: _Optional[_Iterable[int]] = ..., bias: _Optional[_Iterable[float]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., logprobs: _Optional[int] = ..., constraint: _Optional[str] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HandOffState(_message.Message):
    __slots__ = ("request_id", "finished", "position", "row")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    finished: bool
    position: int
    row: RowInput
    def __init__(self, request_id: _Optional[int] = ..., finished: _Optional[bool] = ..., position: _Optional[int] = ..., row: _Optional[_Union[RowInput, _Mapping]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("instance", "tokens", "prompts")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    instance: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenItem]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, instance: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenItem, _Mapping]]] = ..., prompts: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "first", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    first: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[int] = ..., first: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenItem(_message.Message):
    __slots__ = ("request_id", "index", "token_id", "finish_reason", "logprobs", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    index: int
    token_id: int
    finish_reason: str
    logprobs: TokenLogprobs
    attempt: int
    def __init__(self, request_id: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[str] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class DeliverResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromPrefill(_message.Message):
    __slots__ = ("ready", "failed", "failure", "loading_percent", "engines", "suspect", "heartbeat", "term")
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOADING_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ready: PrefillReady
    failed: PrefillFailure
    failure: Failure
    loading_percent: int
    engines: PrefillEngines
    suspect: Suspect
    heartbeat: Heartbeat
    term: int
    def __init__(self, ready: _Optional[_Union[PrefillReady, _Mapping]] = ..., failed: _Optional[_Union[PrefillFailure, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., loading_percent: _Optional[int] = ..., engines: _Optional[_Union[PrefillEngines, _Mapping]] = ..., suspect: _Optional[_Union[Suspect, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...

class PrefillEngines(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[PrefillEngine]
    def __init__(self, engines: _Optional[_Iterable[_Union[PrefillEngine, _Mapping]]] = ...) -> None: ...

class PrefillEngine(_message.Message):
    __slots__ = ("url", "is_up", "problem", "tokens_in_flight", "num_done", "num_failed", "num_cancelled", "num_pages", "answer_s", "arrive_s")
    URL_FIELD_NUMBER: _ClassVar[int]
    IS_UP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_S_FIELD_NUMBER: _ClassVar[int]
    url: str
    is_up: bool
    problem: str
    tokens_in_flight: int
    num_done: int
    num_failed: int
    num_cancelled: int
    num_pages: int
    answer_s: float
    arrive_s: float
    def __init__(self, url: _Optional[str] = ..., is_up: _Optional[bool] = ..., problem: _Optional[str] = ..., tokens_in_flight: _Optional[int] = ..., num_done: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_cancelled: _Optional[int] = ..., num_pages: _Optional[int] = ..., answer_s: _Optional[float] = ..., arrive_s: _Optional[float] = ...) -> None: ...

class PrefillReady(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class PrefillFailure(_message.Message):
    __slots__ = ("ticket", "message")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    message: str
    def __init__(self, ticket: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ToPrefill(_message.Message):
    __slots__ = ("prefill", "cancel", "join", "shutdown", "arrived", "term")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillRequest
    cancel: int
    join: Join
    shutdown: Shutdown
    arrived: int
    term: int
    def __init__(self, prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., cancel: _Optional[int] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., arrived: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("transfer", "token_ids", "prompt_logprobs", "front_end")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    transfer: Transfer
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    front_end: str
    def __init__(self, transfer: _Optional[_Union[Transfer, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., front_end: _Optional[str] = ...) -> None: ...
