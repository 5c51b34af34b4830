//! Write tensors of an engine for `llorch diagnose`. Only std is needed; copy this file into your crate.
//!
//!     let mut dump = Dump::open("dump", r#""engine": "mine", "dtype": "float32""#)?;
//!     dump.begin(&[9, 4, 7], 0)?; // once for every call of the forward: token ids, the position of the first one
//!     dump.add("q_rot", Some(layer), &q, &[3, n_heads, head_dim], "")?; // any plain name of yours
//!
//! The text in `open`, and the last argument of `add`, are JSON fields that are said besides, or nothing:
//! `"tokens": [7]` of an array that has the rows of some tokens only, `"strides": [...]` in bytes.
use std::fs::File;
use std::io::{Result, Write};
use std::path::Path;

pub struct Dump {
    data: File,
    index: File,
    offset: usize,
    n_passes: usize,
}

#[allow(dead_code)]
impl Dump {
    pub fn open(folder: impl AsRef<Path>, more: &str) -> Result<Dump> {
        std::fs::create_dir_all(&folder)?;
        let file = |name| File::create(folder.as_ref().join(name));
        let mut dump = Dump { data: file("data.bin")?, index: file("index.jsonl")?, offset: 0, n_passes: 0 };
        writeln!(dump.index, r#"{{"llorch_dump": 1{}}}"#, besides(more))?;
        Ok(dump)
    }

    pub fn begin(&mut self, ids: &[u32], first_position: usize) -> Result<()> {
        let n_pass = self.n_passes;
        self.n_passes += 1;
        writeln!(self.index, r#"{{"pass": {n_pass}, "ids": {ids:?}, "first_position": {first_position}}}"#)
    }

    pub fn add(&mut self, name: &str, layer: Option<usize>, array: &[f32], shape: &[usize], more: &str) -> Result<()> {
        let bytes: Vec<u8> = array.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.add_bytes(name, layer, "f32", &bytes, shape, more)
    }

    /// Of another dtype, "f16", "bf16", "f64": its little-endian bytes.
    pub fn add_bytes(
        &mut self, name: &str, layer: Option<usize>, dtype: &str, bytes: &[u8], shape: &[usize], more: &str,
    ) -> Result<()> {
        self.data.write_all(bytes)?; // before its line, so that the index is right also after a crash
        let layer = layer.map_or(String::new(), |layer| format!(r#", "layer": {layer}"#));
        let place = format!(r#""shape": {shape:?}, "file": "data.bin", "offset": {}"#, self.offset);
        self.offset += bytes.len();
        writeln!(self.index, r#"{{"name": "{name}", "dtype": "{dtype}", {place}{layer}{}}}"#, besides(more))
    }
}

fn besides(more: &str) -> String {
    if more.is_empty() { String::new() } else { format!(", {more}") }
}
