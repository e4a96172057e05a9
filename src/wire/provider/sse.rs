//! Server-sent events: bytes in pieces of any size become the data of events.
//!
//! Pure. Source: HTML Living Standard, section 9.2.6, "Interpreting an event stream". The type of an event is
//! not kept: what models send says it in the data as well.

use std::mem;

use crate::wire::provider::Failure;

/// The largest event that is put together, in bytes: a reply of a model is far smaller.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Cuts a stream into events. Keeps what is incomplete until more comes.
#[derive(Debug, Default)]
pub struct Framer {
    line: Vec<u8>,
    /// The data lines of the event under way, each with its newline.
    data: Vec<u8>,
    is_after_carriage_return: bool,
}

impl Framer {
    /// Takes the next piece of the stream and returns the data of the events that it completes.
    ///
    /// # Errors
    /// When one event grows beyond 16 MiB; the stream is of no use any more then.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, Failure> {
        let mut events = Vec::new();
        for &byte in bytes {
            // CR LF is one line end even when the pieces part between them.
            let is_second = mem::replace(&mut self.is_after_carriage_return, byte == b'\r') && byte == b'\n';
            match byte {
                b'\n' if is_second => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                byte => self.line.push(byte),
            }
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                let told = format!("one event of the stream has more than {MAX_EVENT_BYTES} bytes");
                return Err(Failure::Final(told));
            }
        }
        Ok(events)
    }

    /// The last event of a stream that ended without the blank line behind it.
    pub fn finish(mut self) -> Option<String> {
        if !self.line.is_empty() {
            self.end_line();
        }
        self.end_line()
    }

    fn end_line(&mut self) -> Option<String> {
        let whole = mem::take(&mut self.line);
        let line = whole.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&whole);
        if line.is_empty() {
            self.data.pop()?; // the newline of its last line
            return Some(String::from_utf8_lossy(&mem::take(&mut self.data)).into_owned());
        }
        // Comments, types, ids, reconnection times and whatever comes later are skipped.
        match line.strip_prefix(b"data")? {
            [b':', b' ', value @ ..] | [b':', value @ ..] | value @ [] => self.data.extend_from_slice(value),
            _ => return None,
        }
        self.data.push(b'\n');
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let mut framer = Framer::default();
        let mut events = Vec::new();
        for piece in pieces {
            events.extend(framer.push(piece).unwrap());
        }
        events.extend(framer.finish());
        events
    }

    #[test]
    fn a_stream_is_cut_into_events_wherever_its_pieces_part() {
        let check = |stream: &str, expected: &[&str]| {
            let bytes = stream.as_bytes();
            assert_eq!(read(&[bytes]), expected, "{stream:?} whole");
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(read(&single), expected, "{stream:?} byte by byte");
            for at in 0..=bytes.len() {
                let (head, tail) = bytes.split_at(at);
                assert_eq!(read(&[head, tail]), expected, "{stream:?} parted at {at}");
            }
        };
        check("data: a\n\ndata: b\n\n", &["a", "b"]);
        check("data: a\r\n\r\ndata: b\r\n\r\n", &["a", "b"]);
        check("data: a\r\rdata: b\r\r", &["a", "b"]);
        check("event: ping\ndata: {}\n\n", &["{}"]);
        check(": a comment\n\ndata:tight\n\n", &["tight"]);
        check("data: one\ndata: two\n\n", &["one\ntwo"]);
        check("data\n\n", &[""]);
        check("event: only a name\n\ndata: x\n\n", &["x"]);
        check("data:  two spaces\n\n", &[" two spaces"]);
        check("\u{feff}data: after a mark\n\n", &["after a mark"]);
        check("id: 1\nretry: 10\nodd: x\ndata: x\n\n", &["x"]);
        check("data: no blank line at the end\n", &["no blank line at the end"]);
        check("data: not even a line end", &["not even a line end"]);
        check("data: 日本語\n\n", &["日本語"]);
        check("", &[]);
        check("\n\n\n", &[]);
    }

    proptest::proptest! {
        #[test]
        fn any_stream_gives_the_same_events_however_it_is_cut(
            stream in "(data|event|id|x|:|: |\n|\r|\r\n|[a-z]|日){0,60}",
            size in 1_usize..9,
        ) {
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(size).collect();
            proptest::prop_assert_eq!(read(&pieces), read(&[stream.as_bytes()]));
        }
    }

    #[test]
    fn bytes_that_are_no_text_do_not_stop_the_stream() {
        assert_eq!(read(&[b"data: a\xffb\n\n"]), ["a\u{fffd}b"]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let piece = vec![b'x'; 1 << 20];
        for line_end in ["", "\ndata: "] {
            let mut framer = Framer::default();
            framer.push(b"data: ").unwrap();
            let pushed = (0..17).try_for_each(|_| {
                framer.push(&piece)?;
                framer.push(line_end.as_bytes()).map(drop)
            });
            assert!(matches!(pushed, Err(Failure::Final(told)) if told.contains("16777216 bytes")));
        }
    }
}
