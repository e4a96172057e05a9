//! The wall clock and the source of randomness.
//!
//! Times on disk and on the wire are milliseconds or seconds since 1970, UTC.

use std::fs::File;
use std::io::{self, Read};
use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970.
pub fn now_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Seconds since 1970.
pub fn now_seconds() -> u64 {
    now_millis() / 1000
}

/// A time as `20261130T142009.123Z`, which sorts by time as text.
pub fn compact_utc(millis: u64) -> String {
    let (year, month, day) = civil_from_days(millis / 86_400_000);
    let of_day = millis % 86_400_000;
    let (seconds, millis) = (of_day / 1000, of_day % 1000);
    format!(
        "{year:04}{month:02}{day:02}T{:02}{:02}{:02}.{millis:03}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Year, month and day of a day counted from 1970-01-01, in the proleptic Gregorian calendar.
///
/// Counts days of years that begin in March, so that the leap day is the last of its year.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // days from 0000-03-01 to 1970-01-01
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// `bytes` random bytes as lower-case hexadecimal digits.
///
/// # Errors
/// When `/dev/urandom` cannot be read.
pub fn random_hex(bytes: usize) -> io::Result<String> {
    let mut random = vec![0; bytes];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_counted_rightly() {
        let check = |millis: u64, expected: &str| assert_eq!(compact_utc(millis), expected);
        check(0, "19700101T000000.000Z");
        check(951_782_400_000, "20000229T000000.000Z");
        check(1_796_048_409_123, "20261130T142009.123Z");
        check(4_102_444_799_999, "20991231T235959.999Z");
    }

    #[test]
    fn random_texts_differ() {
        let (a, b) = (random_hex(16).unwrap(), random_hex(16).unwrap());
        assert!(a.len() == 32 && a != b);
    }
}
